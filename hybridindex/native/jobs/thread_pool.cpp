#include "jobs/thread_pool.h"

#include <cerrno>
#include <cstdint>
#include <stdexcept>
#include <string>

#include <sched.h>
#include <unistd.h>

namespace hybridindex {
namespace {

// Nothing lies there.
ThreadPool::Work* busy() { return reinterpret_cast<ThreadPool::Work*>(std::uintptr_t{1}); }

int checked(int n_helpers) {
    if (n_helpers < 0) throw std::invalid_argument("n_helpers is " + std::to_string(n_helpers) + "; expected 0 or more");
    return n_helpers;
}

}  // namespace

ThreadPool::ThreadPool(int n_helpers)
    : n_helpers_(checked(n_helpers)), pid_(getpid()), idle_(n_helpers),
      helpers_(std::make_unique<Helper[]>(static_cast<std::size_t>(n_helpers))) {
    for (int i = 0; i < n_helpers; ++i) sem_init(&helpers_[i].asked, 0, 0);
    try {
        for (int i = 0; i < n_helpers; ++i)
            helpers_[i].thread = std::thread([this, i] { serve(helpers_[i]); });
    } catch (...) {
        stop();
        throw;
    }
}

ThreadPool::~ThreadPool() {
    stop();
    // A handle of a parent's thread may be that of a new one here: it is neither joined nor detached.
    if (getpid() != pid_) static_cast<void>(helpers_.release());
}

void ThreadPool::stop() {
    if (getpid() != pid_) return;
    stop_.store(true, std::memory_order_release);
    for (int i = 0; i < n_helpers_; ++i) {
        std::thread& thread = helpers_[i].thread;
        if (!thread.joinable()) continue;
        sem_post(&helpers_[i].asked);
        thread.join();
        sem_destroy(&helpers_[i].asked);
    }
}

void ThreadPool::serve(Helper& self) {
    // A helper that wakes where its caller runs must not take that core from it: somebody else may get it next.
    const sched_param plain{};
    if (sched_getscheduler(0) == SCHED_OTHER) sched_setscheduler(0, SCHED_BATCH, &plain);
    for (;;) {
        while (sem_wait(&self.asked) != 0 && errno == EINTR) {}
        if (stop_.load(std::memory_order_acquire)) return;
        Work* work = self.work.load(std::memory_order_acquire);
        // Nothing, where it was taken back. `busy` stands for all work: this may be asked for something else at once.
        if (work == nullptr || !self.work.compare_exchange_strong(work, busy(), std::memory_order_acquire)) continue;
        work->help();
        work->inside_.fetch_sub(1, std::memory_order_release);  // from here on it may be gone
        self.work.store(nullptr, std::memory_order_release);
        idle_.fetch_add(1, std::memory_order_relaxed);
    }
}

int ThreadPool::ask(Work& work, int most) {
    if (most <= 0 || n_helpers_ == 0 || getpid() != pid_) return 0;
    int found = 0;
    for (int i = 0; i < n_helpers_ && found < most; ++i) {
        Helper& helper = helpers_[i];
        Work* nothing = nullptr;
        if (helper.work.load(std::memory_order_relaxed) != nullptr) continue;
        work.inside_.fetch_add(1, std::memory_order_relaxed);
        if (!helper.work.compare_exchange_strong(nothing, &work, std::memory_order_release, std::memory_order_relaxed)) {
            work.inside_.fetch_sub(1, std::memory_order_relaxed);
            continue;
        }
        idle_.fetch_sub(1, std::memory_order_relaxed);
        sem_post(&helper.asked);
        ++found;
    }
    return found;
}

void ThreadPool::take_back(Work& work) {
    for (int i = 0; i < n_helpers_ && work.inside() > 0; ++i) {
        Work* asked = &work;
        if (!helpers_[i].work.compare_exchange_strong(asked, nullptr, std::memory_order_relaxed)) continue;
        work.inside_.fetch_sub(1, std::memory_order_relaxed);
        idle_.fetch_add(1, std::memory_order_relaxed);
    }
}

}  // namespace hybridindex
