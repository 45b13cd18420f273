"""Methods that are callables and give a Schedule: what is asked of one, and a published one that is written so."""
