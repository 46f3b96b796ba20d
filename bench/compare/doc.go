// Package compare says whether one commit is slower than another: it runs the microbenchmarks of both in turn, A B A B, and
// compares the samples of each with a rank test, as benchstat does, so that a difference is reported only where it stands
// out from the noise. Beside times it compares allocations, of the microbenchmarks and, per message, of whole brokers under
// load.
package compare
