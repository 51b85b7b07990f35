"""Drawing tokens: a step's logits, changed by sampling features, in; drawn tokens out."""
