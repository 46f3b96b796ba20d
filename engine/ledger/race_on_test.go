//go:build race

package ledger

// raceBuild shortens the model test: the package starts no goroutine, and instrumented it is fifteen times slower.
const raceBuild = true
