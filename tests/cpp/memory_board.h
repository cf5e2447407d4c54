// A board of the vote for ranks that are threads.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "random_gathers.h"
#include "transport/setup/roll_call.h"

namespace stress {

class MemoryBoard final : public pg_sdma::Board {
 public:
  void post(const std::string& key, const std::string& value) override {
    std::lock_guard<std::mutex> lock(mutex_);
    values_[key] = value;
    posted_.notify_all();
  }

  std::string claim(const std::string& key, const std::string& value) override {
    std::lock_guard<std::mutex> lock(mutex_);
    posted_.notify_all();
    return values_.emplace(key, value).first->second;
  }

  bool await(const std::vector<std::string>& keys, std::chrono::milliseconds timeout) override {
    std::unique_lock<std::mutex> lock(mutex_);
    return posted_.wait_for(lock, timeout, [&] {
      return std::all_of(keys.begin(), keys.end(),
                         [&](const std::string& key) { return values_.count(key) != 0; });
    });
  }

  std::vector<std::string> get(const std::vector<std::string>& keys) override {
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<std::string> found;
    for (const std::string& key : keys) {
      if (values_.count(key) == 0) give_up("gone while it is read: %s", key.c_str());
      found.push_back(values_[key]);
    }
    return found;
  }

  std::optional<std::string> peek(const std::string& key) override {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = values_.find(key);
    return found == values_.end() ? std::nullopt : std::optional(found->second);
  }

  void remove(const std::string& key) override {
    std::lock_guard<std::mutex> lock(mutex_);
    values_.erase(key);
  }

  int64_t count(const std::string& key) override {
    std::lock_guard<std::mutex> lock(mutex_);
    return ++counts_[key];
  }

  std::vector<std::string> keys() {
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<std::string> keys;
    for (const auto& [key, value] : values_) keys.push_back(key);
    return keys;
  }

 private:
  std::mutex mutex_;
  std::condition_variable posted_;
  std::map<std::string, std::string> values_;
  std::map<std::string, int64_t> counts_;
};

}  // namespace stress
