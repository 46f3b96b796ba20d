// Package admin serves the admin port: health, metrics, statistics and profiles over HTTP, all of it read-only.
//
//	GET /healthz                 200 or 503 with {"healthy": bool, "state": text}
//	GET /metrics                 Prometheus text (404 when metrics are switched off)
//	GET /stats?topic=T&group=G   statistics as JSON; at least one filter is required (400)
//	GET /debug/pprof/            profiles of the Go runtime; block and mutex with ?seconds=N, during which they are sampled
//
// The command line reads these. Objects may gain fields, and lists are sorted by name:
//
//	GET /broker                  {"node_id", "uptime_s", "connections", "version", ...}
//	GET /leader                  {"leader_id", "leader_epoch", "quorum_state"}
//	GET /topics                  [{"name", "partitions", "state", "created_epoch", "id", ...}]
//	GET /groups?topic=T          [{"group", "topic", "lag", "state", ...}]; the filter is optional
//	GET /groups/NAME?topic=T     the group's members: [{"member", "assignment_epoch", "ownership_epoch", "lag", ...}];
//	                             the topic is needed where several have a group of this name (409)
//
// Errors are text/plain: 400 for a wrong request, 404 for what does not exist, 503 when the broker does not answer in
// time. There is no authentication, so the port belongs on a loopback address.
package admin
