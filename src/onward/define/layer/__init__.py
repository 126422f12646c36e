"""Layers: functions of arrays that declare the parameters they are not given.

    dense           fc  embedding
    convolution     conv  pool
    normalization   dropout  batch_norm  layer_norm  rms_norm
    attention       attention
    recurrent       lstm  gru
    activation      relu  gelu  tanh  softmax ...
    costs           mse  huber  cross_entropy  binary_cross_entropy  cosine_similarity
    metric          accuracy  auc  perplexity
    base            layer and cost, which make a layer of your own function; weight, which declares in it

Every layer takes ``name=``. Its ops stand in the scope of that name, its parameters are called
``name/w`` and so on, and what it returns is the Variable of that name. Unless given it is the layer's kind,
numbered: ``fc_0``, ``fc_1``. Two layers of one name share their parameters; so do two that are given the same
``w``, which is what ``onward.parameter`` or ``onward.var`` returned, or any array. ``b=False`` means none.

Given all of its arrays, a layer computes like any function of JAX, inside of ``jax.jit`` or anywhere.

>>> import onward as ow
>>> def network():
...     hidden = ow.layer.fc(ow.data("images", (None, 784)), 128, act="relu")
...     logits = ow.layer.fc(hidden, 10, name="head")
...     return ow.layer.cross_entropy(logits, ow.data("labels", (None,), "int32"))
>>> [v.name for v in ow.trace(network, batch_size=64).parameters]
['fc_0/w', 'fc_0/b', 'head/w', 'head/b']
"""

from onward.core.pointing import pointing
from onward.define.declare import data
from onward.define.layer.activation import (
    elu,
    gelu,
    hard_silu,
    leaky_relu,
    log_softmax,
    relu,
    relu6,
    selu,
    sigmoid,
    silu,
    softmax,
    softplus,
    tanh,
)
from onward.define.layer.attention import attention
from onward.define.layer.base import cost, layer, weight
from onward.define.layer.convolution import conv, pool
from onward.define.layer.costs import binary_cross_entropy, cosine_similarity, cross_entropy, huber, mse
from onward.define.layer.dense import embedding, fc
from onward.define.layer.error import clip_error
from onward.define.layer.metric import accuracy, auc, perplexity
from onward.define.layer.normalization import batch_norm, dropout, layer_norm, rms_norm
from onward.define.layer.recurrent import gru, lstm

__all__ = [
    "accuracy",
    "attention",
    "auc",
    "batch_norm",
    "binary_cross_entropy",
    "clip_error",
    "conv",
    "cosine_similarity",
    "cost",
    "cross_entropy",
    "data",
    "dropout",
    "elu",
    "embedding",
    "fc",
    "gelu",
    "gru",
    "hard_silu",
    "huber",
    "layer",
    "layer_norm",
    "leaky_relu",
    "log_softmax",
    "lstm",
    "mse",
    "perplexity",
    "pool",
    "relu",
    "relu6",
    "rms_norm",
    "selu",
    "sigmoid",
    "silu",
    "softmax",
    "softplus",
    "tanh",
    "weight",
]

__getattr__ = pointing(__name__, "ow.layer")
