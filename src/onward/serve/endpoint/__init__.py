"""A Model behind HTTP, requests of many clients joined into batches.

endpoint   what a person makes: an application, and how it is started, reloaded and ended
source     where the model comes from: an object or a file
plan       one way of asking a model: what goes in, what comes out, whether requests may be joined
compiled   what was compiled for the lengths that were asked for last
probe      tries a model on made-up data: which batch sizes it takes, whether examples stay apart
trials     whether examples stay apart at other lengths than the traced ones
batcher    the thread that computes; what waits, and when it goes
npy        arrays from bytes that nobody vouches for
bodies     a request's body becomes arrays, or a sentence that says what is wrong
answers    arrays become the answer's bytes
routes     what is answered where
metrics    what is counted, in the text format of Prometheus
openapi    the routes described for programs
page       the routes described for people
server     the socket, the signals, the end
watch      looks whether the model's file has changed
refusal    a request that is answered by an error
"""
