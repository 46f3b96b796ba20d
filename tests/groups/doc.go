// Package groups tests, against real mortard processes and with the client library, how consumers share a topic: that
// partitions have one owner at a time whoever comes, goes, dies or is frozen, and that nothing is lost or turned round on
// the way.
package groups
