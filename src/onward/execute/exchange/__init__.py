"""Arrays that other libraries write and read: safetensors files under other names and axes."""
