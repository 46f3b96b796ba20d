// Package cli tests the mortarmq command against real mortard processes, as a user runs them.
package cli
