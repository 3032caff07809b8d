"""Synchronises directory trees and object stores, in both directions."""
