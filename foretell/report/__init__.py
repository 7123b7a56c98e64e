"""Reports that are kept and sent around: one HTML page that needs no network and no scripts, its figures inside."""
