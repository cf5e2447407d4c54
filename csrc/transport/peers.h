// Whether the processes of a group still live, asked without trusting process ids, which are
// reused.
#pragma once

#include <vector>

namespace pg_sdma {

class Peers {
 public:
  // `pids`: the process of each rank, in this process's pid namespace.
  explicit Peers(const std::vector<int>& pids);
  ~Peers();
  Peers(const Peers&) = delete;
  Peers& operator=(const Peers&) = delete;

  // True once rank's process has ended. A process that only just began to end may still count as
  // alive.
  bool gone(int rank) const;
  int pid(int rank) const { return pids_[rank]; }

 private:
  std::vector<int> pids_;
  std::vector<int> descriptors_;  // pidfds; -1 where the kernel has none: that rank counts as alive
};

}  // namespace pg_sdma
