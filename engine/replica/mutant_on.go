//go:build mutants

package replica

// chosen is the deliberate fault in force.
var chosen string

// ChooseMutant puts a deliberate fault of this package in force, for every machine of the process, and "" none. Tests use it
// to see that they would notice; it exists under the build tag mutants only.
func ChooseMutant(name string) { chosen = name }

// mutant reports whether the deliberate fault of that name is chosen.
func mutant(name string) bool { return name == chosen }
