"""Training loops on a trace: how busy engines and trainer are, in turns, one step off, and fully asynchronous."""
