from workshop import workshop

__all__ = ["workshop"]
