// Threads that share the work of one operation.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace ft {

inline void pause_cpu() {
#if defined(__x86_64__)
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

// Work is cut into chunks; whoever is free takes the next. Workers spin for some tens of microseconds between two runs,
// then sleep, and a run never waits for a worker that has not begun: cheap when something else needs the cores.
class Pool {
 public:
  explicit Pool(int threads) : size_(threads) {
    for (int i = 1; i < threads; ++i) workers_.emplace_back([this] { work(); });
  }
  ~Pool() {
    stop_ = true;
    epoch_.fetch_add(1);
    epoch_.notify_all();
    for (auto &w : workers_) w.join();
  }
  // Calls job(first, last) over [0, items), a chunk at a time; items / chunk must stay below 2^32.
  template <class Job> void run(int64_t items, int64_t chunk, const Job &job) {
    if (size_ == 1 || items <= chunk) { job(int64_t(0), items); return; }
    const uint64_t chunks = uint64_t((items + chunk - 1) / chunk);
    items_ = items; chunk_ = chunk; chunks_ = chunks;
    context_ = &job;
    call_ = [](const void *c, int64_t a, int64_t b) { (*static_cast<const Job *>(c))(a, b); };
    done_.store(0, std::memory_order_relaxed);
    left_.store(++runs_ << 32 | chunks); // publishes all of the above
    epoch_.fetch_add(1);
    if (sleeping_.load() > 0) epoch_.notify_all();
    while (take()) {}
    for (int spins = 0; done_.load(std::memory_order_acquire) != chunks; ++spins) {
      if (spins < 2000) pause_cpu(); else std::this_thread::yield();
    }
  }
  int size() const { return size_; }

 private:
  // Do one chunk. The number of the run and the chunks left are one word: whoever lowers it owns a chunk of the run that
  // is going on, which cannot end, nor its fields change, before that chunk is done.
  bool take() {
    uint64_t left = left_.load();
    do {
      if ((left & 0xffffffff) == 0) return false;
    } while (!left_.compare_exchange_weak(left, left - 1));
    int64_t first = int64_t(chunks_ - (left & 0xffffffff)) * chunk_;
    call_(context_, first, first + chunk_ < items_ ? first + chunk_ : items_);
    done_.fetch_add(1, std::memory_order_release);
    return true;
  }
  void work() {
    while (!stop_) {
      uint32_t seen = epoch_.load();
      int spins = 0;
      while (!take() && ++spins < 3000) pause_cpu();
      if (spins < 3000) continue;
      sleeping_.fetch_add(1);
      epoch_.wait(seen); // returns at once if a run began since
      sleeping_.fetch_sub(1);
    }
  }
  int size_;
  std::vector<std::thread> workers_;
  std::atomic<uint64_t> left_{0}, done_{0};
  std::atomic<uint32_t> epoch_{0};
  std::atomic<int> sleeping_{0};
  std::atomic<bool> stop_{false};
  uint64_t runs_ = 0, chunks_ = 0;
  int64_t items_ = 0, chunk_ = 1;
  const void *context_ = nullptr;
  void (*call_)(const void *, int64_t, int64_t) = nullptr;
};

} // namespace ft
