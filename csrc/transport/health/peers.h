// Whether the processes of a group still live, asked without trusting process ids, which are
// reused.
#pragma once

#include <memory>
#include <vector>

namespace pg_sdma {

class Peers {
 public:
  // `pids`: the process of each rank, in this process's pid namespace. All groups of this process
  // share one descriptor a process. Throws std::runtime_error where there is none to be had: then
  // the end of that rank would go unnoticed.
  explicit Peers(const std::vector<int>& pids);
  Peers(const Peers&) = delete;
  Peers& operator=(const Peers&) = delete;

  // True once rank's process has ended. A process that only just began to end may still count as
  // alive.
  bool gone(int rank) const;
  int pid(int rank) const { return pids_[rank]; }

 private:
  class Process;
  static std::shared_ptr<const Process> process(int pid);

  std::vector<int> pids_;
  std::vector<std::shared_ptr<const Process>> processes_;  // of the ranks
};

}  // namespace pg_sdma
