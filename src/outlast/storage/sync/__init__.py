"""Directory trees and object stores, synchronised in both directions."""
