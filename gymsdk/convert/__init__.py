"""Translations between the bodies of one API and another: plain JSON objects in, plain JSON objects out."""
