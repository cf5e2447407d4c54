// The record of all lanes of this process as one JSON text: on demand, and in a file when a group
// breaks. docs/reliability.md describes its fields.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "backend/log/flight_recorder.h"
#include "transport/health/progress.h"

namespace pg_sdma {

// What one lane knows.
struct LaneRecord {
  std::string group;
  std::string device;
  std::string inner;
  int rank = 0;                   // in the group
  std::vector<int> global_ranks;  // of the group's ranks
  std::string fault;              // why the group is broken; empty while it is not
  size_t capacity = 0;
  uint64_t recorded = 0;
  std::vector<FlightRecorder::Entry> entries;
  uint64_t number = 0;              // of the last operation on the direct route
  std::vector<RankProgress> ranks;  // on the direct route; empty without one
};

std::string to_json(const LaneRecord& record);

// A lane, as far as records go. record() may be called from any thread.
class Recorded {
 public:
  virtual ~Recorded() = default;
  virtual LaneRecord record() const = 0;
};

namespace flight_record {

void add(const Recorded* lane);
// Waits for a dump that reads the lane. Does nothing in a forked child, whose lanes are the
// parent's.
void remove(const Recorded* lane);

// {"version", "rank", "pid", "time_ns", "reason", "lanes": [...]}. `rank`: of this process.
std::string json(int rank, const std::string& reason);
// Writes json() to `<prefix><rank>.json`, whole or not at all. Returns why it could not.
std::string write(const std::string& prefix, int rank, const std::string& reason);

}  // namespace flight_record
}  // namespace pg_sdma
