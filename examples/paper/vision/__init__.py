"""Image classification for the paper's negative control: data, augmentation, ResNets, training."""
