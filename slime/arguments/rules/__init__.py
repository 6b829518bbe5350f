"""The rules that a run's arguments must satisfy, by topic.

A rule yields one violation for each way in which it is broken. A rule that is only a condition and a message is a row of a
table (`refused`, `warned`). Every rule is always checked, so that a user reads all mistakes at once.
"""
