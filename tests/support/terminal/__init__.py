"""What a person sees: terminals, screens and pages."""
