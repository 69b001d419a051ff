#include "scan/thread_pool.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include <unistd.h>

namespace hybridindex {

ThreadPool::ThreadPool(int n_helpers)
    : n_helpers_(n_helpers), pid_(getpid()), work_(std::make_unique<std::condition_variable>()),
      left_(std::make_unique<std::condition_variable>()) {
    if (n_helpers < 0) throw std::invalid_argument("n_helpers is " + std::to_string(n_helpers) + "; expected 0 or more");
    threads_.reserve(static_cast<std::size_t>(n_helpers));
    try {
        for (int i = 0; i < n_helpers; ++i) threads_.emplace_back([this] { serve(); });
    } catch (...) {
        {
            const std::lock_guard lock(mutex_);
            stop_ = true;
        }
        work_->notify_all();
        for (std::thread& thread : threads_) thread.join();
        throw;
    }
}

ThreadPool::~ThreadPool() {
    if (getpid() != pid_) {
        // Threads of the parent: nothing here to join.
        for (std::thread& thread : threads_) thread.detach();
        static_cast<void>(work_.release());
        static_cast<void>(left_.release());
        return;
    }
    {
        const std::lock_guard lock(mutex_);
        stop_ = true;
    }
    work_->notify_all();
    for (std::thread& thread : threads_) thread.join();
}

void ThreadPool::serve() {
    std::unique_lock lock(mutex_);
    for (;;) {
        const auto found = std::find_if(tasks_.begin(), tasks_.end(), [](const Task* task) { return task->open && task->wanted > 0; });
        if (found == tasks_.end()) {
            if (stop_) return;
            work_->wait(lock);
            continue;
        }
        Task* const task = *found;
        ++task->active;
        --task->wanted;
        lock.unlock();
        (*task->help)();
        lock.lock();
        task->open = false;  // whoever returns found nothing left to start
        if (--task->active == 0) left_->notify_all();
    }
}

void ThreadPool::run(int n_helpers, const std::function<void()>& help, const std::function<void()>& lead,
                     const std::function<void()>& on_nudge) {
    if (n_helpers <= 0 || n_helpers_ == 0 || getpid() != pid_) {
        lead();
        return;
    }
    Task task{&help, n_helpers};
    {
        const std::lock_guard lock(mutex_);
        tasks_.push_back(&task);
    }
    for (int i = 0; i < n_helpers && i < n_helpers_; ++i) work_->notify_one();
    lead();
    std::unique_lock lock(mutex_);
    task.open = false;
    while (task.active > 0) {
        const std::size_t seen = nudges_;
        lock.unlock();
        on_nudge();
        lock.lock();
        if (task.active > 0 && nudges_ == seen) left_->wait(lock);
    }
    tasks_.erase(std::find(tasks_.begin(), tasks_.end(), &task));
}

void ThreadPool::nudge() {
    if (getpid() != pid_) return;  // nobody waits, and a thread of the parent may have held the lock
    {
        const std::lock_guard lock(mutex_);
        ++nudges_;
    }
    left_->notify_all();
}

}  // namespace hybridindex
