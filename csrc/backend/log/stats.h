// Counts of a lane's operations by name, route and reason.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

namespace pg_sdma {

class Stats {
 public:
  using Row = std::tuple<std::string, std::string, std::string, int64_t, int64_t>;

  // `reason` is empty for the direct route.
  void count(const std::string& operation, const std::string& reason, uint64_t total_bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    Count& count = counts_[{operation, reason}];
    ++count.calls;
    count.bytes += static_cast<int64_t>(total_bytes);
  }

  // (operation, route, reason, calls, bytes: see Call::total_bytes)
  std::vector<Row> rows() const {
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<Row> rows;
    for (const auto& [key, count] : counts_) {
      const auto& [operation, reason] = key;
      rows.emplace_back(operation, reason.empty() ? "direct" : "inner", reason, count.calls,
                        count.bytes);
    }
    return rows;
  }

 private:
  struct Count {
    int64_t calls = 0;
    int64_t bytes = 0;
  };
  mutable std::mutex mutex_;
  std::map<std::pair<std::string, std::string>, Count> counts_;
};

}  // namespace pg_sdma
