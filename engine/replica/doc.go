// Package replica is the replication protocol of a cluster, as two pure machines: they do no I/O, have no clock, no
// goroutine and no lock, and know nothing of what the rounds hold.
//
//   - Log, one per log (a shard's journal), numbers a leader's rounds, matches a follower's with the leader's, and says how
//     far the log is committed. It belongs to the shard's goroutine.
//   - Node, one per broker, forms the cluster, elects leaders, keeps their leases, and decides whose word counts. It belongs
//     to the control goroutine. What it wants done comes as outputs, to be carried out in their order.
//
// The host connects them: it carries out a Node's FenceLogs, FollowLeader, Lead, PeerJoined, PeerLeft and LeaderCommits by
// calling the Logs' methods on their goroutines, and reports with Node.Fenced and Node.Progress. The protocol and why it is
// safe are in docs/design.md.
//
// # A leadership
//
//	Persist, FenceLogs       the promise to itself; Node.Persisted, Node.Fenced
//	FetchLog                 what the promises showed to be missing: Log.Adopt, Node.Fetched
//	Lead                     Log.Lead, then Log.Seal for the opening round, in every log
//	PeerJoined               Log.Join; from then on Log.Next, Log.Sent, Log.PeerFlushed, Log.Rejected
//	Node.Opened, Serve       when the opening rounds are committed (Log.Commit, Log.Opening) and folded
//	StopServing, FenceLogs   another epoch
//
// # What must hold in the host
//
//   - A Persist is durable before Persisted, a round before Flushed; nothing that failed is ever reported as durable.
//   - Between FenceLogs and Fenced every log was fenced, and nothing leaves for a log under a lower epoch afterwards.
//   - StopServing is in force before any later output is carried out, and every loop that serves compares Node.LeaseEnd with
//     the clock before each batch.
//   - Rounds that a leader has committed before its own disk had them (Log.Commit above Log.FlushedIndex) go to nobody
//     before they are flushed here too.
//   - A leader keeps all rounds in memory that are not committed or not flushed here; so what it has no longer is committed.
//   - A follower gives up rounds only of a log that is Log.Behind, with a floor that is durable before.
//   - The time handed to Receive was read after the message arrived.
//
// # Deliberate faults
//
// Under the build tag mutants, internal/mutant breaks one rule of the protocol: what tests of it are worth shows in whether they
// notice. mutants_test.go lists the faults.
package replica
