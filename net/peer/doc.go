// Package peer connects the nodes of a cluster.
package peer
