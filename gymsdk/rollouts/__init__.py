"""Many episodes: planned, played, kept on disk, resumed, summed up."""
