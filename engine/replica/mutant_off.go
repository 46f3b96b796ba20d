//go:build !mutants

package replica

// mutant reports whether the deliberate fault of that name is chosen: never, without the build tag.
func mutant(string) bool { return false }
