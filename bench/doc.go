// Package bench measures mortard: it starts real broker processes, loads them over loopback TCP with a generator that
// speaks the wire protocol itself, and measures in the same run what the hardware would allow and what other brokers make of
// it, so that results can be given as ratios.
//
//	Run ──► round 1..n ──► every case ──► every target in turn (A B C, A B C ...) ──► Sample ──► tables, JSON lines, report.html
//	                        │
//	                        ├─ limits         fio and pwritev2 loops, echo servers on gnet and on plain Go, processes of their own
//	                        ├─ mortard        started on an empty directory for each case, one node or three
//	                        └─ peers          other brokers behind the interface Peer; package bench/peers has them
//
// Everybody is loaded by the same kind of generator: requests are laid out or appended to one buffer and written together
// as far as the window of unanswered ones allows, answers are read in the same turn. A peer's driver only turns bytes into
// requests and answers back.
//
// # Latency
//
// Latencies go into HdrHistograms in nanoseconds. Where a rate is given, a message's time counts from the moment at which
// it was due, not from the moment at which the generator got round to it: a stall of the broker shows in every message
// that it delayed. A peer that can't keep up with the rate is cut short after a while, and what could not even be sent
// counts with the time that it was late by then. In pipelined runs without a rate a latency counts from the write to the
// socket.
//
// # Honest throughput
//
// A publish run sends at least JournalMultiple times the capacity of the broker's journal, so that what it measures is
// the rate at which segments are written, not the rate at which a burst fits into the journal. It ends with SIGTERM and
// the time until the broker has exited, everything in segments; both times are reported, and the broker's CPU time includes
// the end. A peer's run takes Duration, and nothing of what it does afterwards counts against it.
package bench
