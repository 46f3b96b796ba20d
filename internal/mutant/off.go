//go:build !mutants

// Package mutant puts deliberate faults of the broker in force, one at a time, in builds with the tag mutants: tests use them
// to see that they would notice. In every other build there are none, and the code that asks for them compiles away.
package mutant

// Enabled tells whether this build knows any.
const Enabled = false

// Is reports whether the deliberate fault of that name is in force: never, without the build tag.
func Is(string) bool { return false }

// Choose puts a deliberate fault in force. It does nothing without the build tag.
func Choose(string) {}
