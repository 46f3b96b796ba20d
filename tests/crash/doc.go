// Package crash tortures a broker: it publishes and consumes, kills the process at a random moment, starts it again on
// the same data, and compares what comes out with a model of what went in.
//
// One round of a Scenario:
//
//	start ──► producers send again what was not answered ──► a last message per partition marks the end
//	      ──► the group's consumer must see everything up to there that it had not acknowledged, and nothing else
//	      ──► (some rounds) a new group reads the whole log
//	      ──► producers publish pipelined, the consumer acknowledges most of what it gets ──► kill -9, or SIGTERM
//
// # What must hold
//
//   - a message whose PUB was answered is in the log, once, at the sequence of the answer, with its bytes;
//   - a message whose PUB was not answered is in the log at most once, and exactly once after its producer's retry;
//   - nothing that was never sent is in the log, and sequences have no holes;
//   - a delivery whose ACK was answered never comes back, one that was never acknowledged does, as its first attempt;
//   - a retry of what is stored is answered with the original sequence and as deduplicated.
//
// Timing decides where exactly a kill hits, so a seed reproduces the workload, not the run.
package crash
