// Package bench measures mortard: it starts real broker processes, loads them over loopback TCP with a generator that
// speaks the wire protocol itself, and measures in the same run what the hardware would allow, so that results can be
// given as ratios.
//
//	Run ──► round 1..n ──► every case in turn (A B A B ...) ──► Sample ──► table, JSON lines, report.html
//	                        │
//	                        ├─ disk limits    fio, and a loop over package ring alone
//	                        ├─ echo           a gnet server in a process of its own
//	                        └─ broker cases   mortard, started on an empty directory for each
//
// # Latency
//
// Latencies go into HdrHistograms in nanoseconds. Where a rate is given, a message's time counts from the moment at which
// it was due, not from the moment at which the generator got round to it: a stall of the broker shows in every message
// that it delayed. In pipelined runs without a rate it counts from the write to the socket.
//
// # Honest throughput
//
// A publish run sends at least JournalMultiple times the capacity of the broker's journal, so that what it measures is
// the rate at which segments are written, not the rate at which a burst fits into the journal. It ends with SIGTERM and
// the time until the broker has exited, everything in segments; both times are reported.
package bench
