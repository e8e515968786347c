"""Where the output stands in its prediction: in sync, diverged, in sync again; see README.md here."""
