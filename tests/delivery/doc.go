// Package delivery tests, against real mortard processes, what becomes of a message that a consumer group got: retries,
// leases, dead letters and restarts. The consumers speak the protocol themselves, frame by frame, so that the tests decide
// what is acknowledged, when, and what a client that breaks off leaves behind.
package delivery
