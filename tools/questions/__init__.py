"""Questions about facts in forms that no training row has, about files of code, and a chat's whose answers' ends are counted."""
