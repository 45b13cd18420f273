"""Published ways to choose blocks of keys: a file a method has its configuration and its launches."""
