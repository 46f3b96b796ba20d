// Package harness runs real mortard processes for tests and benchmarks, and speaks the client protocol to them without
// the client library, so that what a test sees is what is on the wire.
//
// A Daemon is one process: Start waits until it can serve, Stop ends it as an operator would, Kill as a power cut does
// to a process. A Conn is one raw connection; a Consumer is one subscription on it.
package harness
