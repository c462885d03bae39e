"""The environments that come with Palaestra, the grading of code, and the images that tasks need."""
