"""What looks at attention from outside: inputs, metrics, diff, demo, pictures and the command line."""
