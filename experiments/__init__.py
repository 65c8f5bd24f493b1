"""Everything with an effect: runs, their folders, figures."""
