"""Helpers of the tests, in folders by what they are about."""
