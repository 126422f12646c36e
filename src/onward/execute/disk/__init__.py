"""Put things on the disk: whole or not at all, by one writer, sealed, every bit as it was.

Checkpoints, model files and the records of servers share it::

    durable     files and folders that appear whole, and vanish the same way
    lock        one process at a time
    background  writing beside the training
    encoding    arrays of any dtype, and random keys, as plain numbers
    tensors     plain numbers as a safetensors file
    fields      JSON that anybody may have written
"""
