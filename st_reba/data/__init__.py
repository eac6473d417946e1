"""Every way that texts and tables come in."""
