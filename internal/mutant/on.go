//go:build mutants

// Package mutant puts deliberate faults of the broker in force, one at a time: tests use them to see that they would notice.
package mutant

// Enabled tells whether this build knows any.
const Enabled = true

// chosen is the deliberate fault in force.
var chosen string

// Choose puts a deliberate fault in force for the whole process, and "" none. Nothing may run meanwhile.
func Choose(name string) { chosen = name }

// Is reports whether the deliberate fault of that name is in force.
func Is(name string) bool { return name == chosen }
