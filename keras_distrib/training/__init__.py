"""What Keras needs to train on replicas: trainer, losses, optimizer, tape."""
