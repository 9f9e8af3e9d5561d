"""The compile driver: a program and its directives in, a proved plan out."""
