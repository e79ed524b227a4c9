"""Files that tests write: models, snapshots, weights, and damaged ones."""
