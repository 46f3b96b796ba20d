// Package cluster tests clusters of three real mortard processes: leaders that are killed, stopped and cut off, followers that
// are slow, late or come back with an empty disk. Load is what publishes and consumes meanwhile and knows what must hold of it;
// Failover kills the leader again and again under it, and measures how long writes stay away.
//
// Nothing here limits how long the cluster may take: each wait is for a condition, for a minute.
package cluster
