"""Where a request stands in its prediction: followed, left and found again; see README.md here."""
