from onward.define.declare import data
from onward.define.layer.activation import *
from onward.define.layer.dense import *
from onward.define.layer.convolution import *
from onward.define.layer.normalization import *
from onward.define.layer.cost import mse,huber,cross_entropy,binary_cross_entropy,cosine_similarity
from onward.define.layer.metric import *
from onward.define.layer.base import cost, layer, weight
