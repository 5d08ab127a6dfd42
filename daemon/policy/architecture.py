"""From a config.json to the layers of a model."""
