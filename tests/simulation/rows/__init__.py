"""Rows that are added and deleted while nodes of a cluster are searched: what each state of the index answers, what a
node does about changes, and users who make them.
"""
