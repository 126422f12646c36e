"""The words of torch, Keras, optax and flax, and what to write here in their place.

Words stand in lower case without underscores, so that ``Linear``, ``linear`` and ``LINEAR`` are one. Beside a
word is the path of a public name (``layer.fc``) or a sentence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

_PATHS = {
    "layer.fc": "linear dense fullyconnected",
    "layer.conv": "conv1d conv2d conv3d convolution",
    "layer.pool": "maxpool avgpool maxpool2d avgpool2d maxpooling2d averagepooling2d globalaveragepooling2d",
    "layer.embedding": "embed",
    "layer.batch_norm": "batchnorm1d batchnorm2d batchnorm3d batchnormalization",
    "layer.layer_norm": "layernormalization",
    "layer.rms_norm": "rmsnormalization",
    "layer.attention": "multiheadattention multiheaddotproductattention selfattention dotproductattention "
    "scaleddotproductattention",
    "layer.lstm": "lstmcell optimizedlstmcell",
    "layer.gru": "grucell",
    "layer.dropout": "dropout1d dropout2d",
    "layer.silu": "swish",
    "layer.cross_entropy": "crossentropyloss sparsecategoricalcrossentropy categoricalcrossentropy nllloss "
    "softmaxcrossentropy softmaxcrossentropywithintegerlabels",
    "layer.binary_cross_entropy": "bce bceloss bcewithlogitsloss binarycrossentropywithlogits "
    "sigmoidbinarycrossentropy",
    "layer.mse": "mseloss meansquarederror squarederror",
    "layer.huber": "huberloss smoothl1loss",
    "layer.accuracy": "sparsecategoricalaccuracy categoricalaccuracy",
    "layer": "nn layers losses functional metrics",
    "optimizer": "optim optimizers",
    "schedule": "lrscheduler schedules schedulers",
    "schedule.cosine": "cosinedecay cosinedecayschedule cosineannealinglr warmupcosine warmupcosinedecay "
    "warmupcosinedecayschedule",
    "schedule.exponential": "exponentiallr exponentialdecay",
    "schedule.piecewise": "steplr multisteplr piecewiseconstantdecay piecewiseconstantschedule",
    "schedule.linear": "linearlr linearschedule",
    "schedule.one_cycle": "onecyclelr",
    "schedule.plateau": "reducelronplateau reduceonplateau",
    "schedule.join": "joinschedules sequentiallr",
    "initializer.xavier_uniform": "xavier glorot",
    "initializer.he_normal": "he kaiming",
    "initializer": "init initializers",
    "ClipByGlobalNorm": "clipgradnorm globalclipnorm clipgrads",
    "ClipByValue": "clipgradvalue",
    "WeightDecay": "adddecayedweights",
    "EMA": "averagedmodel exponentialmovingaverage",
    "Group": "multitransform paramgroups",
    "accumulate": "multisteps gradientaccumulation microbatches",
    "guard": "applyiffinite",
    "low_rank": "lora peft loraconfig getpeftmodel adapter adapters",
    "merge_low_rank": "mergeandunload mergeadapter mergelora",
    "mixed_precision": "autocast gradscaler amp jmp dynamicscale",
    "recompute": "remat rematerialize gradientcheckpointing",
    "replicate": "distribute pmap dataparallel distributeddataparallel ddp",
    "Sharded": "fsdp fullyshardeddataparallel zero zeroredundancyoptimizer",
    "compile": "jit nnxjit filterjit execute",
    "train": "fit",
    "State": "trainstate optstate",
    "Checkpoints": "modelcheckpoint checkpointmanager checkpointer backupandrestore savecheckpoint "
    "loadcheckpoint restorecheckpoint",
    "EarlyStop": "earlystopping",
    "Evaluator": "predict evaluate eval inference",
    "batches": "dataloader dataset tensordataset",
    "data": "input placeholder inputspec",
    "parameter": "param getparameter variable addweight createparameter",
    "save": "export savemodel saveweights dump",
    "load": "loadmodel loadweights",
    "summary": "tabulate modelsummary explain",
    "draw": "plotmodel plot visualize",
    "profile": "profiler",
    "cost": "flops costanalysis flopcounter",
    "Optimizer.minimize": "minimize derive",
    "Endpoint": "serve server",
    "cluster": "fleet parameterserver",
    "trace": "define",
    "append_backward": "backward",
    "gradients": "jacobian hessian",
    "optimizer.ScheduleFreeAdamW": "schedulefree",
    "optimizer.PSGDKron": "kron psgd",
}
_GRADIENTS = (
    "Gradients are derived for you: ow.SGD(0.1).minimize(loss, params, x) has them, each with a name to "
    'fetch, such as "grad(w)". ow.gradients(program, of, with_respect_to) derives any others.'
)
_NETWORK = "A network is a function that calls layers: def network(): return ow.layer.fc(ow.data('x'), 10)."
_MODES = (
    "Training and evaluation are two Programs over one State: ow.for_test(program), or ow.Evaluator(model)."
)
_CALLBACK = "A callback is a function of an ow.Event: trainer.train(reader, callbacks=[note])."
_RANDOM = "Write jax.random.key(0) in a loop of your own, ow.key() in a loss, ow.Model(network, seed=0)."
_PLAIN = "Between layers everything is plain JAX: "
_SENTENCES = {
    "grad": _GRADIENTS,
    "valueandgrad": _GRADIENTS,
    "applyupdates": "A step does it: state, out = step(state, batch).",
    "chain": "Rules compose: ow.Adam(1e-3, rules=[ow.ClipByGlobalNorm(1.0)]). ow.from_optax(chain) takes "
    "a chain of optax.",
    "injecthyperparams": 'They are state: state.replace({"learning_rate": 1e-4}) compiles nothing.',
    "masked": "Rules and groups choose by name: ow.WeightDecay(0.01, where='*/w'), ow.Group('*/b', ...).",
    "sequential": _NETWORK,
    "module": _NETWORK,
    "compact": _NETWORK,
    "network": _NETWORK,
    "flatten": _PLAIN + "x.reshape(len(x), -1).",
    "reshape": _PLAIN + "x.reshape(len(x), -1).",
    "concatenate": _PLAIN + "jnp.concatenate([a, b], -1).",
    "onehot": _PLAIN + "jax.nn.one_hot(labels, 10).",
    "scan": "Write jax.lax.scan: layers that repeat become a loop by themselves, see step.plan().",
    "vmap": "Write jax.vmap: a step is a pure function, and a State is a pytree.",
    "makejaxpr": "Write print(ow.trace(loss, params, x)), or jax.make_jaxpr.",
    "stopgradient": "Write jax.lax.stop_gradient; or freeze by ow.Group('*/w', frozen=True).",
    "callback": _CALLBACK,
    "callbacks": _CALLBACK,
    "freeze": "Write ow.Adam(1e-3, groups=[ow.Group('embed/*', frozen=True)]).",
    "restore": "Write state = step.restore(folder), or trainer.restore(folder).",
    "trainstep": "Write step = ow.compile(program), then state, out = step(state, batch).",
    **dict.fromkeys(("random", "manualseed", "prngkey", "rngs", "makerng", "nextrngkey"), _RANDOM),
    "nograd": _MODES,
    "trainmode": _MODES,
    "detectanomaly": "Write ow.compile(program, check_finite=True).",
    "debugnans": "Write ow.compile(program, check_finite=True).",
    "clip": "It is ow.ClipByGlobalNorm, ow.ClipByNorm or ow.ClipByValue.",
    "checkpoint": "It is ow.recompute for activations, ow.Checkpoints for files.",
    "device": "Arrays are put on a device by jax.device_put; ow.replicate(program, devices=8) uses several.",
}
_HYPERPARAMETERS = {
    "weightdecay": "Write ow.AdamW(1e-3, weight_decay=0.01), or rules=[ow.WeightDecay(0.01)].",
    "momentum nesterov": "Write ow.Momentum(0.1, 0.9, nesterov=True).",
    "clipnorm": "Write rules=[ow.ClipByNorm(1.0)].",
    "globalclipnorm maxnorm maxgradnorm": "Write rules=[ow.ClipByGlobalNorm(1.0)].",
    "clipvalue": "Write rules=[ow.ClipByValue(1.0)].",
    "useema": "Write rules=[ow.EMA(0.999)].",
    "trainable requiresgrad": "Write frozen=True, in a group: ow.Group('embed/*', frozen=True).",
    "mask": "Write groups=[ow.Group('*/b', weight_decay=0.0)].",
}

_PREDICT = (
    "Write model(model.parameters, x); or ow.Evaluator(model).forward(x=x), to read a layer by "
    ".activation(name) too."
)
_TRAIN = "Write ow.Trainer(model, ow.Adam(1e-3)).train(reader, epochs=10)."
_EACH_STEP = {
    "train fit": "Write a loop around state, out = step(state, **batch); or step.run(state, reader).",
    "params parameters": "Write state.parameters, of the State that the step returned.",
    "loss": "Write out.loss, of what the step returned: state, out = step(state, batch).",
    "summary": "Write ow.summary(step.program).",
    "costanalysis": "Write ow.cost(step.program).",
}
_METHODS: Mapping[str, Mapping[str, str]] = {
    "Trainer": {
        "fit": "Write trainer.train(reader, epochs=10, test=test_reader).",
        "evaluate validate": "Write trainer.test(reader).",
        "predict": "Write ow.Evaluator(trainer.model).forward(x=x), and read a layer by .activation(name).",
        "compile": "It is compiled when it first runs.",
        "savecheckpoint savemodel": "Write trainer.checkpoint(folder) to resume later.",
        "load loadcheckpoint resume": "Write trainer.restore(folder).",
        "parameters params": "Write trainer.model.parameters.",
        "summary": "Write ow.summary(trainer.program).",
        "learningrate lr optimizer": 'Write trainer.replace({"learning_rate": 1e-4}), to set it.',
    },
    "Model": {
        "fit trainonbatch train": _TRAIN,
        "compile": "The loss belongs to the network, the optimizer to ow.Trainer(model, ow.Adam(1e-3)).",
        "predict forward apply call": _PREDICT,
        "evaluate test": "Write ow.Evaluator(model).test(reader).",
        "eval": _MODES,
        "summary": "Write ow.summary(model.topology).",
        "params variables weights namedparameters statedict getweights": "Write model.parameters.",
        "loadstatedict setweights loadweights": "Write model.replace({name: array}), or restore(folder).",
        "export saveweights": "Write ow.save(model, path) for a file that answers without your code, "
        "model.save(folder) for the values alone.",
        "to cuda cpu": "Arrays lie where jax.device_put puts them; ow.Trainer(..., devices=8) uses several.",
        "load": "Write model.restore(folder), or ow.load(path).",
    },
    "Evaluator": {
        "predict apply": "Write evaluator.forward(x=x), and read a layer by evaluator.activation(name).",
        "evaluate": "Write evaluator.test(reader).",
    },
    "Step": {
        **_EACH_STEP,
        "save": "Write ow.save(step, path, state).",
        "lower": "Write step.executable(state, *batch).",
    },
    "PipelineStep": {
        **_EACH_STEP,
        "save": "Write ow.save(step.pipeline.program, path, state).",
        "function executable lower prepared compiledtext uncompiled": "A pipeline is an executable for each "
        "stage and work, on devices of their own: step.pipeline.parts has their Programs. To have one "
        "computation, compile the Program that was cut: ow.compile(step.pipeline.program).",
        "cores": "A stage has the devices that ow.pipeline(..., data=) gives it.",
    },
    "State": {
        "params": "Write state.parameters.",
        "step": 'Write int(state["step"]).',
        "optstate": 'The optimizer state is in it by name: state["w/mean"]; list(state) has the names.',
        "loss": "Write out.loss, of what the step returned: state, out = step(state, batch).",
        "statedict": "Write dict(state) for every value by its name, "
        "ow.Checkpoints(folder).save(state, step_number) for a file.",
        "load loadstatedict restore": "Write step.restore(folder).",
        "applygradients": "A step applies them: state, out = step(state, batch).",
        "save": "Write ow.Checkpoints(folder).save(state, step_number).",
        "batchstats stats": "Write state.model_state.",
        "learningrate lr": 'Write state["learning_rate"], and state.replace({"learning_rate": 1e-4}).',
    },
    "Program": {
        "compile jit": "Write ow.compile(program).",
        "run call apply step train": "Write step = ow.compile(program); "
        "state, out = step(step.init(params), batch).",
        "backward grad": "Write ow.append_backward(program), or ow.SGD(0.1).minimize(program).",
        "summary tabulate": "Write ow.summary(program).",
        "draw plot": "Write ow.draw(program).",
        "show graph": "Write print(program), or ow.show(program, depth=1).",
        "cost flops": "Write ow.cost(program).",
        "save": "Write ow.save(program, path, state).",
        "nodes": "Write program.ops.",
        "params": "Write program.parameters.",
        "eval test": "Write ow.for_test(program).",
    },
    "History": {
        "loss accuracy metrics": 'Write history["loss"]; list(history) has the names.',
        "history": 'It is the history itself: history["loss"].',
        "last": 'Write history["loss"][-1].',
    },
    "Out": {
        "metrics accuracy logs": "Write out.aux: what the loss returned beside its value.",
        "grads gradients": 'Write ow.compile(program, fetch=["grad(w)"]), then out["grad(w)"].',
        "item": "Write float(out.loss).",
        "backward": "The step has done it: state, out = step(state, batch).",
    },
}


def _by_word(table: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    return ((plain(word), said) for words, said in table.items() for word in words.split())


def plain(word: str) -> str:
    """The last part of a path, without capitals and underscores.

    >>> plain("layer.batch_norm"), plain("BatchNorm")
    ('batchnorm', 'batchnorm')
    """
    return word.rpartition(".")[2].lower().replace("_", "")


PATHS: Mapping[str, str] = {plain(word): path for path, words in _PATHS.items() for word in words.split()}
SENTENCES: Mapping[str, str] = dict(_by_word(_SENTENCES))
HYPERPARAMETERS: Mapping[str, str] = dict(_by_word(_HYPERPARAMETERS))
METHODS: Mapping[str, Mapping[str, str]] = {owner: dict(_by_word(table)) for owner, table in _METHODS.items()}
